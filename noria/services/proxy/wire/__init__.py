"""The wire formats: from the bytes of an exchange to the record of a call, and back to an answer."""
