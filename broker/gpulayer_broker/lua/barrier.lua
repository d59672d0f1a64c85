-- barrier: a group begins: its callbacks wait for so many children.
-- Guarantee: a barrier that is there is left as it is; one whose children never succeed goes with its lifetime.
-- Keys: root. Arguments: barrier, children, lifetime in ms.
-- Returns: {'ok'} or {'existing'}.
register('barrier', {}, function(K, A)
  local key, children, life, now = K[1] .. 'barrier:' .. A[1], tonumber(A[2]), tonumber(A[3]), H.now()
  if not string.find(A[1], '^[^%s:]+$') or not children or children < 1 or not life or life < 1 then
    return H.refuse('barrier', A[1] .. ' of ' .. A[2] .. ' for ' .. A[3] .. ' ms')
  end
  if redis.call('HSETNX', key, 'children', children) == 0 then return {'existing'} end
  redis.call('PEXPIREAT', key, now + life)
  return {'ok'}
end)
