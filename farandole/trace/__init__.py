"""Where the time goes: spans, their recorder, one clock for all ranks, and Chrome's trace file."""
