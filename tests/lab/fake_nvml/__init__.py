"""A library that answers as NVML does, from a scenario file beside it: see fake_nvml.c."""
