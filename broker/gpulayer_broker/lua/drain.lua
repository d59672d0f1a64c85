-- drain: a worker takes nothing new, or takes work again, or leaves.
-- Guarantee: after the call no claim of this worker grants anything ('draining', 'offline') until it is 'online' again; leaving
--   is refused by nothing and hands its ring to another; what was kept for a job there is free again.
-- Keys: root. Arguments: worker, state ('online', 'draining' or 'offline'), incarnation ('' for anybody else than the worker).
-- Returns: {'ok', jobs it still holds}, {'missing'}, or {'superseded'}: the worker's next incarnation is there.
register('drain', {'allow-oom'}, function(K, A)
  local P, w, now = K[1], A[1], H.now()
  if A[2] ~= 'online' and A[2] ~= 'draining' and A[2] ~= 'offline' then return H.refuse('state', A[2]) end
  local class, incarnation, node = unpack(redis.call('HMGET', P .. 'worker:' .. w, 'class', 'incarnation', 'node'))
  if not class then return {'missing'} end
  if A[3] and A[3] ~= '' and A[3] ~= incarnation then return {'superseded'} end
  redis.call('HSET', P .. 'worker:' .. w, 'state', A[2])
  if A[2] == 'online' then
    H.poke(P, w, now)
  else
    H.idle_remove(P, class, w)
    H.hand_on(P, w, (H.unring(P, w)), now)
    H.lift_of(P, w, node, now)
    if A[2] == 'draining' then H.mail(P, w, 'drain') end
    if A[2] == 'offline' and redis.call('GET', P .. 'keeper') == w then redis.call('DEL', P .. 'keeper') end
  end
  return {'ok', redis.call('SCARD', P .. 'running:' .. w)}
end)
