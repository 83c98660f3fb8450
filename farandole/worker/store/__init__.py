"""The store in which the ranks of a job find each other, for this user's processes alone.

    client.py ──▶ link.py ──▶ Unix socket in a private folder, or TCP with a token (handshake.py)
                                   │
    server.py: one thread, one loop over all connections
         native.py, torch_protocol.py: the two languages that it understands
         table.py: keys, values, and who waits for them

PyTorch's own TCPStore lets in everybody who can reach its port, and holds whatever he sends.
"""
