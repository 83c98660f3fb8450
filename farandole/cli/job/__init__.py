"""What `farandole run` does with its options, up to the end of the job."""
