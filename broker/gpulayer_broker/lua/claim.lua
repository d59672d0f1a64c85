-- claim: a worker takes what it can start now, at most as many jobs as it offers room for.
-- Guarantee: a device, core or byte that another attempt holds is never granted; the same nonce answers with the same grants;
--   a worker with room left is registered idle in this call.
-- Keys: root. Arguments: an offer (h_holdings.lua).
-- Returns: {'ok', {grant, …}}, {'unknown'}: register first, or {'superseded'}: the worker's next incarnation is there. A grant is
--   {id, token, lots, attempt, losses, options, spec, signature, owner, queued_ms, state, cancel, from, to} (items of an
--   array; -1 for a plain job), ride and lane (h_rides.lua; '' for none).
register('claim', {'allow-oom'}, function(K, A)
  return H.claim(K[1], H.offer(A, 1), H.now())
end)
