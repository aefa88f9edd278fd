"""What each process of a run does: controller, policy and rollout."""
