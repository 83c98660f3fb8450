"""L-BFGS for a torch model over a pool: DistBelief's Sandblaster (Dean et al. 2012).

minimise        the iterations; scalars only
history         the m pairs and the products between them, which give the direction
line_search     strong Wolfe conditions
vectors         where the long vectors are: here, or on parameter servers (`served_vectors`)
gradient        the loss and its gradient as a sum over chunks of rows
optimizer       `LBFGS`, which users call
"""
