"""What "good" means: one file per reward template, and how rewards become advantages."""
