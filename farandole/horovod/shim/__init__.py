"""A folder for PYTHONPATH: the `horovod` in it is Farandole's. See `farandole.horovod.aliases`."""
