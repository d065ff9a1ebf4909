"""The frozen graph of a model, and what each analysis says of it."""
