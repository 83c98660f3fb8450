"""What a table looks like, column by column."""
