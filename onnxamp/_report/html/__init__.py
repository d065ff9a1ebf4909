"""One self-contained HTML page per report: facts (:mod:`.page`), and the page made of them (:mod:`.render`)."""
