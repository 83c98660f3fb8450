"""`farandole pack`: makes shards of a folder of files."""
