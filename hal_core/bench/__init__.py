"""Speed and accuracy of kernels, of other libraries' kernels and of the machine, measured in one run; see docs/benchmarks.md."""
