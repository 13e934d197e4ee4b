"""Company enrichment: requests about companies by SIREN or SIRET, and the jobs that ask the registers for them."""
