"""What runs when: definitions, partitions, jobs, sensors, schedules."""
