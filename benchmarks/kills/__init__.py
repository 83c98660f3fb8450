"""The parts of `benchmarks/elastic.py`.

task         the model, the data and what each worker writes down
ours         the training script for `farandole run`
torchruns    the same for torchrun: DistributedDataParallel, and a checkpoint now and then
strikes      kills workers of a job that runs, and reads how far it has come
replay       the same steps in one process
"""
