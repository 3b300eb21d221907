"""The doors: Dagster resources that configure and open what lies below."""
