-- submit: one new job enters the queue.
-- Guarantee: the record, its place in the queue, the idempotency key and the wake-up of one worker are one step; an id or key
--   that was used before changes nothing.
-- Keys: root. Arguments: a submit block (h_queueing.lua).
-- Returns: 'added', or {'added', id} under another id than its own; {'existing', id}, {'conflict', id}, {'introduce', signature},
--   {'full', limit}, {'missing', predecessor}.
register('submit', {}, function(K, A)
  local P, b = K[1], H.block(A, 1)
  local wrong = H.wrong(b)
  if wrong then return wrong end
  local known = H.repeated(P, b)
  if known then return known end
  if not H.known(P, b.sig) then return {'introduce', b.sig} end
  local limit = H.config(P, 'max_queued', 2000000)
  if redis.call('ZCARD', P .. 'jobs:queued') >= limit then return {'full', limit} end
  local gates, answer = H.gates(P, b)
  if not gates then return answer end
  H.create(P, b, gates)
  return b.id == A[1] and 'added' or {'added', b.id}
end)
