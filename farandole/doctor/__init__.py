"""What works on this machine: the checks behind `farandole doctor`."""
