"""What clients, servers and the registrar say to each other, and how it is sealed and framed."""
