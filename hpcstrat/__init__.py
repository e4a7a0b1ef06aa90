"""The Strategy API of `tf.distribute` for NumPy and CuPy programs: `mpirun -n 4 python train.py`."""
