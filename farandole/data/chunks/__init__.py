"""Data that are read in chunks of consecutive samples: shards, and arrays larger than memory."""
