"""Where variables live: one copy for all ranks or one each (central, mirrored), in host memory or on GPUs."""
