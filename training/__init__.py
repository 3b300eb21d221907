"""What runs on the accelerator: batch -> loss -> checkpoint."""
