"""Where the bytes of a shard are: on a disk, behind a URL, or in a copy of either."""
