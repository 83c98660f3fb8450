"""One file for each format that shards can have."""
