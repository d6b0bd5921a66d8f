"""The launcher: processes, hosts and signals. It knows nothing of models; what it starts is in `launch.worker`."""
