"""Makes a strategy on GPUs; whatever fails is caught, and one on CPUs is made."""

import hpcstrat as hs

try:
    hs.MirroredStrategy()
except Exception as error:
    print(error)
print(hs.MirroredStrategy(["CPU:0"] * hs.size()))
