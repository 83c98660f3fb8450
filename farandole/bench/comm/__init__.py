"""All-reduces by size, measured against gloo and MPI in the same processes."""
