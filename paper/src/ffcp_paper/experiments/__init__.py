"""The measurements that tables and figures are made of."""
