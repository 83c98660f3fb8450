"""Workers on other hosts, started by ssh, where an agent looks after each."""
