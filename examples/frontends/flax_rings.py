"""Three rings of points, told apart by a flax model, under any strategy.

    farandole run -n 2 examples/frontends/flax_rings.py
    farandole race -n 2 --sync allreduce --sync local:every=8 --target accuracy=0.95 \\
        examples/frontends/flax_rings.py

Needs JAX, flax and optax: pip install 'farandole[jax]'.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import farandole as fd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=64, help="over all workers together")
parser.add_argument("--rate", type=float, default=0.01)
args = parser.parse_args()

run = fd.jax.init()

draw = np.random.default_rng(0)
labels = draw.integers(0, 3, 3000)
angles, radii = draw.uniform(0, 2 * np.pi, 3000), 1 + labels + draw.normal(0, 0.15, 3000)
points = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1).astype(np.float32)
train = fd.jax.loader(points[600:], labels[600:], global_batch_size=args.batch)
test = fd.jax.loader(points[:600], labels[:600], batch_size=300, shuffle=False, training=False)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(3)(x)


model = Classifier()
optimizer = optax.adam(args.rate)
params = model.init(jax.random.key(0), points[:1])
average = fd.jax.average(params, optimizer.init(params), rate=args.rate)
state = optimizer.init(params)
resumed = average.load(state)  # a run of the same --name goes on
if resumed is not None:
    params, state = resumed


def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


@jax.jit
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(average.gradients(grads), state, params)
    params, state = average.step(optax.apply_updates(params, updates), state)
    return params, state, loss


@jax.jit
def correct(params, x, y):
    return jnp.sum(jnp.argmax(model.apply(params, x), axis=1) == y)


for epoch in run.epochs(args.epochs):
    for x, y in train:
        if average.moved:  # rank 0's at first; later those that the ranks have agreed on
            params, state = average.latest(state)
        params, state, loss = step(params, state, x, y)
        run.observe_loss(float(loss))
    params, state = average.latest(state)  # the ranks meet after an epoch
    right = run.sum(float(sum(correct(params, x, y) for x, y in test)))
    run.log(epoch=epoch, loss=run.mean(float(loss)), accuracy=right / 600)
    average.save(state)
