"""Topics of documents."""
