"""Train on several processes, each with its share of every batch: mpiexec -n 2 python average.py MODEL DATA TRAINED."""

import sys

import numpy as np
import onnx
from mpi4py import MPI

from onnxamp.train import SGD, Batches, StepArrays, build_train_network

world = MPI.COMM_WORLD


def average(arrays: StepArrays) -> None:
    for array in arrays.values():  # reads each from the device, once
        world.Allreduce(MPI.IN_PLACE, array)
        np.divide(array, world.size, out=array)


model, data, trained, *level = sys.argv[1:]
net = build_train_network(model, SGD(learning_rate=0.1), "cross-entropy", *level)
for batch in Batches(np.load(data), size=16):  # in the same order in all processes
    step = net.gradients({name: array[world.rank :: world.size] for name, array in batch.items()})
    average(step.gradients)
    average(step.statistics)
    step.loss = world.allreduce(step.loss) / world.size
    result = net.apply(step)  # the same in all processes: so are the weights
    if world.rank == 0:
        print(result.loss, result.scale)
if world.rank == 0:
    onnx.save(net.export(), trained)
