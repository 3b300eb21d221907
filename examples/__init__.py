"""Agents and reward files as a user would write them, with the traffic that drives them."""
