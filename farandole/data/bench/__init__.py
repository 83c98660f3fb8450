"""Input that is measured, for `farandole bench data`."""
