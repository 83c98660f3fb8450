"""Starting workers, and finding out in a worker how it was started."""
