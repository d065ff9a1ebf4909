"""Text from models, safe to print."""


def printable(text: str) -> str:
    """Return a text with its control and direction characters (terminal escapes in names, say) written out.

    Nobody has reason to trust the names in a model: whatever goes to a terminal passes through here.
    """
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )
