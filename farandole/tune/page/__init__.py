"""The page of a study: its trials, which choices matter, how choices and results go together."""
