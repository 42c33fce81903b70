"""What the GPU kernels cost: counted without a GPU, and measured on one."""
