"""A trial of `farandole run --per-gpu auto`: a run that is measured, and then thrown away."""
