"""Images of which parts can be read: `TileSource` over arrays and slides."""
