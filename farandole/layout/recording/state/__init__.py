"""Plain values that a recorded forward read, and how they are compared later."""
