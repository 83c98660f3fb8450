"""Where workers are started: on this host, or on others by ssh."""
