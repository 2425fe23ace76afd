"""Process groups and canonical collectives: the transport moves bytes, additions are ours, in fp32 and in tree order."""
