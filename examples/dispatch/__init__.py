"""A dispatch desk: users ask, a router picks the tool, the tool runs, a reply phrases what it found."""
