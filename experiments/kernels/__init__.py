"""What `compile_kernels` and `kernel_bench` are made of: devices, shapes, compiles, reports, checks."""
