"""What runs in a worker: how it was started, how it joins the others, how it reports failure."""
