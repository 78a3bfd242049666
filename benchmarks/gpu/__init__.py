"""What only a GPU can show, in ten minutes of one: `python -m benchmarks.gpu`."""
