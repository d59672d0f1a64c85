-- requeue: a dead letter enters the queue anew, under its id.
-- Guarantee: the old record and its place among the dead letters go in the call that makes the new one; of two callers one requeues.
-- Keys: root. Arguments: a submit block (h_queueing.lua) with the id of the dead letter.
-- Returns: {'added', id}, {'existing', id} for the same block again, {'missing', id} for what is no dead letter (any more), or
--   {'introduce', signature}.
register('requeue', {}, function(K, A)
  local P, b = K[1], H.block(A, 1)
  local wrong = H.wrong(b)
  if wrong then return wrong end
  if redis.call('HGET', H.job(P, b.id), 'spec') == b.spec then return {'existing', b.id} end
  if not redis.call('ZSCORE', P .. 'dead:' .. b.queue, b.id) then return {'missing', b.id} end
  if not H.known(P, b.sig) then return {'introduce', b.sig} end
  H.purge(P, b.id)
  H.create(P, b, {open = {}})
  return {'added', b.id}
end)
