"""What a `Run` is put together from, beside its loaders, passes, metrics and saves."""
