"""Manifests for Kubernetes: an Indexed Job with its Service, or Kubeflow's PyTorchJob."""
