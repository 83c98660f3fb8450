"""One parameter server: the ranges it holds, and the sockets it serves."""
